"""`python -m headrace.prefill`"""

from headrace.bus import run_service

from .service import PrefillService

if __name__ == "__main__":
    run_service(PrefillService)
