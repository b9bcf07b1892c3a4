"""What prefill and decode workers share: the engine's thread, the legs of a hand-off, the kvstore client, the simulated
engine."""
