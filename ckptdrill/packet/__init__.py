"""The evidence packet: what a run found, for people and for tools, from stored files only.

In the order things happen: `folder` reads run.json and every cell's plan and verdict; `view` turns
them into one frozen object, worst cell first, and decides nothing but order and wording (`cost`
adds up the ledger, `plots` places what is drawn); `html`, `machine` and `markdown` render that
object; `folder` writes the files and, last of all, the list of checksums that `verify` (or
`sha256sum -c` alone) checks later. No clock is read and no verdict is made here, so derived files
can be deleted and made again, byte for byte.
"""

from ckptdrill.packet.folder import read, write
from ckptdrill.packet.html import render as render_page
from ckptdrill.packet.machine import packet_schema
from ckptdrill.packet.verify import Problem, ProblemKind, verify
from ckptdrill.packet.view import ApprovalView, GateRow, PacketView, StoredCell, build

__all__ = [
    "ApprovalView",
    "GateRow",
    "PacketView",
    "Problem",
    "ProblemKind",
    "StoredCell",
    "build",
    "packet_schema",
    "read",
    "render_page",
    "verify",
    "write",
]
