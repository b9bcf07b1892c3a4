"""`python -m headrace.kvstore`"""

from headrace.bus import run_service

from .service import KvStoreService

if __name__ == "__main__":
    run_service(KvStoreService)
