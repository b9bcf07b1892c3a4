"""Fixtures of the gateway's tests; what they are made of is in gateway_cluster.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # test modules here share gateway_cluster

from gateway_cluster import bare, cluster, nats, tokenizer  # noqa: F401
