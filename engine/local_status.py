"""What a machine serves now, as a document: asked of its processes and ports, not of what was written down."""

from typing import Any

from rackplan.engine.deploy_state import Record, StateFolder
from rackplan.engine.local_servers import describe
from rackplan.engine.servers import answers, processes_of


def status_document(state: StateFolder) -> dict[str, Any]:
    """{"current", "previous", "last"}, each None or {"id", "phase", "what", "url", "started", "reason", "result",
    "processes", "servers": [{"name", "alive", "healthy", "url", "log"}]}. Raises InputError on a damaged state file."""
    known = state.read()
    return {
        "state": str(state.folder),
        "current": _live(known.current) if known.current else None,
        "previous": _told(known.previous) if known.previous else None,
        "last": _told(known.last) if known.last else None,
    }


def _told(record: Record) -> dict[str, Any]:
    return {
        "id": record.id,
        "phase": record.phase,
        "what": describe(record),
        "url": record.url,
        "started": record.started,
        "reason": record.reason,
        "result": record.result,
    }


def _live(record: Record) -> dict[str, Any]:
    servers = [
        {
            "name": s.name,
            "alive": s.alive,
            "healthy": s.alive and s.url is not None and answers(s.url),
            "url": s.url,
            "log": s.log,
        }
        for s in record.servers
    ]
    processes = len(processes_of(record.id))
    died = record.phase == "serving" and not all(s["alive"] for s in servers)
    phase = "failed" if died else record.phase
    return {**_told(record), "phase": phase, "processes": processes, "servers": servers}
