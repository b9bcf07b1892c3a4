"""The bus: subjects, messages, the connection, services' lives, presence, traces.

`docs/architecture.md` says who sends what to whom; `messages.py` is the list. `testing.py` starts a real server for tests.
"""

from . import messages, subjects
from .connection import Bus, BusSettings, Subscription
from .errors import BusError, BusTimeout, Disconnected, NoResponder, Overflow, StartError, TooLarge
from .presence import Peers, Prober, Pulse
from .service import Service, run_service
from .settings import Meta, Settings, SettingsError
from .subjects import nuid
from .trace import Trace, gather

__all__ = [
    "Bus", "BusError", "BusSettings", "BusTimeout", "Disconnected", "Meta", "NoResponder", "Overflow", "Peers", "Prober",
    "Pulse", "Service", "Settings", "SettingsError", "StartError", "Subscription", "TooLarge", "Trace", "gather", "messages",
    "nuid", "run_service", "subjects",
]  # fmt: skip
