"""The files that start `ckptdrill nightly` at night: for cron, systemd, GitHub and GitLab. Pure.

Each is complete for the command that it is given, so that it can be put in place as it is; what
only its owner can know stands in a comment.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from types import MappingProxyType


class Kind(StrEnum):
    """Who starts it."""

    CRON = "cron"
    SYSTEMD = "systemd"
    GITHUB = "github"
    GITLAB = "gitlab"


# % ends the command of a crontab line, and begins a specifier in a unit file.
_CRON = """\
# crontab -e; cron mails what is printed: with `>/dev/null` at the end, only errors
17 2 * * * {command}
"""
_SYSTEMD = """\
# /etc/systemd/system/ckptdrill-{name}.service
[Unit]
Description=Restore drills of {name}

[Service]
Type=oneshot
# The user that trains: the job runs as this one.
User={user}
ExecStart={command}
# Another run is under way: no failure.
SuccessExitStatus=75
# Stopping means Ctrl-C: the run is continued the next night.
KillMode=mixed
TimeoutStopSec=60

# /etc/systemd/system/ckptdrill-{name}.timer
[Unit]
Description=Restore drills of {name}, nightly

[Timer]
OnCalendar=*-*-* 02:17:00
Persistent=true

[Install]
WantedBy=timers.target
"""
_GITHUB = """\
# .github/workflows/ckptdrill.yml; the runner needs the job's interpreter and its GPUs
name: restore drills
on:
  schedule:
    - cron: "17 2 * * *"
  workflow_dispatch:
concurrency: restore-drills
jobs:
  drill:
    runs-on: [self-hosted, gpu]
    timeout-minutes: 360
    steps:
      - uses: actions/checkout@v4
        with:
          clean: false # else the runs of earlier nights are removed, where they are below it
      - run: {command}
      - if: always()
        run: {pack}
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: packet
          path: packet.tgz
"""
_GITLAB = """\
# .gitlab-ci.yml; a pipeline schedule starts it
restore-drills:
  rules:
    - if: $CI_PIPELINE_SOURCE == "schedule"
  tags: [gpu]
  resource_group: restore-drills
  timeout: 6h
  variables:
    GIT_CLEAN_FLAGS: none # else the runs of earlier nights are removed, where they are below it
  script:
    - {command}
  after_script:
    - {pack}
    - {junit}
  artifacts:
    when: always
    paths: [packet.tgz]
    reports:
      junit: junit.xml
"""
_CHECKPOINTS = "work"  # the part of a run folder that is no evidence
_FORMS = MappingProxyType(
    {Kind.CRON: _CRON, Kind.SYSTEMD: _SYSTEMD, Kind.GITHUB: _GITHUB, Kind.GITLAB: _GITLAB}
)


def render(kind: Kind, command: Sequence[str], name: str, runs: str, user: str) -> str:
    """The file of one kind that starts `command` for the matrix `name`, whose runs are in `runs`.

    A build server starts in a checkout of its own, and keeps what lies in it: the newest run is
    packed there, wherever `runs` is.
    """
    newest = f"{runs}/{name}/latest"
    pack = ["tar", "-C", newest, f"--exclude=./{_CHECKPOINTS}", "-czf", "packet.tgz", "."]
    return _FORMS[kind].format(
        command=_quoted(kind, command),
        name=name,
        user=user,
        pack=_for_yaml(shlex.join(pack)),
        junit=_for_yaml(shlex.join(["cp", f"{newest}/junit.xml", "junit.xml"])),
    )


def _quoted(kind: Kind, command: Sequence[str]) -> str:
    if kind is Kind.CRON:
        return shlex.join(command).replace("%", "\\%")
    if kind is Kind.SYSTEMD:
        return " ".join(map(_for_systemd, command))
    return _for_yaml(shlex.join(command))


def _for_systemd(argument: str) -> str:
    """Systemd has its own quotes: no shell reads the line."""
    escaped = argument.replace("\\", "\\\\").replace('"', '\\"')
    escaped = escaped.replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(argument) & set(" \"'\\;") else escaped


def _for_yaml(text: str) -> str:
    """As one scalar in double quotes, in which a backslash and a quote are escaped."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
