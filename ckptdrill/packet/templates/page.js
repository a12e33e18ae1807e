// Filters, opening, and unpacking. Without it a small packet is complete; nothing here fetches.
"use strict";
(() => {
  const all = (selector) => [...document.querySelectorAll(selector)];
  const cells = all("details.cell");
  const tools = document.querySelector(".tools");
  let bodies = null;

  // Fragments were escaped when they were made; the content policy lets no script in them run.
  const fill = (cell) => {
    if (!bodies || cell.querySelector(".body")) return;
    cell.insertAdjacentHTML("beforeend", bodies[Number(cell.dataset.n)]);
  };
  const open = (cell, yes) => {
    if (yes) fill(cell);
    cell.open = yes;
  };
  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed.textContent), (c) => c.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    bodies = JSON.parse(await new Response(plain).text());
    cells.filter((cell) => cell.open).forEach(fill);
  };

  // A link to a cell opens it, also where a filter hides it or the address names it already.
  const follow = (hash) => {
    const cell = document.getElementById(decodeURIComponent(hash.slice(1)));
    if (!cell || !cell.matches("details.cell")) return;
    cell.hidden = false;
    open(cell, true);
    cell.scrollIntoView();
    cell.querySelector("summary").focus({ preventScroll: true });
  };

  const filter = () => {
    const chosen = new FormData(tools);
    const kinds = new Set(chosen.getAll("kind"));
    const only = chosen.has("unexpected");
    const drill = chosen.get("drill");
    const words = chosen.get("words").toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const cell of cells) {
      const text = words.length ? textOf(cell) : "";
      cell.hidden = !kinds.has(cell.dataset.kind)
        || (only && !("unexpected" in cell.dataset))
        || Boolean(drill && drill !== cell.dataset.drill)
        || !words.every((word) => text.includes(word));
      shown += cell.hidden ? 0 : 1;
    }
    tools.querySelector("output").textContent =
      shown === cells.length ? "" : `${shown} of ${cells.length} shown`;
    document.getElementById("nothing").hidden = shown > 0;
  };
  const texts = new Map();
  const textOf = (cell) => {
    if (!texts.has(cell)) {
      const packed = (bodies?.[Number(cell.dataset.n)] ?? "").replace(/<[^>]*>/g, " ");
      texts.set(cell, `${cell.id} ${cell.textContent} ${packed}`.toLowerCase());
    }
    return texts.get(cell);
  };

  if (tools) {
    tools.hidden = false;
    tools.addEventListener("input", filter);
    tools.addEventListener("submit", (event) => event.preventDefault());
    tools.addEventListener("click", (event) => {
      const yes = event.target.closest("button")?.dataset.open;
      if (yes) cells.filter((cell) => !cell.hidden).forEach((cell) => open(cell, yes === "yes"));
    });
  }
  cells.forEach((cell) => cell.addEventListener("toggle", () => cell.open && fill(cell)));
  addEventListener("hashchange", () => follow(location.hash));
  document.querySelector("main").addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#cell-"]');
    if (link) follow(link.hash);
  });
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = cells.filter((cell) => !cell.open && !cell.hidden);
    closed.forEach((cell) => open(cell, true));
  });
  addEventListener("afterprint", () => closed.forEach((cell) => open(cell, false)));
  const packed = document.getElementById("packed");
  (packed ? unpack(packed) : Promise.resolve()).then(() => follow(location.hash));
})();
