"""kvlane: a KV-cache-aware gateway in front of OpenAI-compatible LLM servers, from Python.

`simulate` and `sweep` compare policies, fleets and loads in virtual time; `read_records` and `report` show recorded runs;
`Router` places requests for a gateway of your own. `python -m kvlane` runs the program.
"""

from ._core import VERSION as __version__
from ._core import Applied, Decision, Endpoint, Router
from ._results import Records, Report, Simulation, Sweep
from ._runs import Settings, read_records, report, simulate, sweep

__all__ = [
    "Applied",
    "Decision",
    "Endpoint",
    "Records",
    "Report",
    "Router",
    "Settings",
    "Simulation",
    "Sweep",
    "__version__",
    "read_records",
    "report",
    "simulate",
    "sweep",
]
