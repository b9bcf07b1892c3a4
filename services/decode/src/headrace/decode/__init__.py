"""The decode service: grants memory, admits hand-offs, samples every token of a request."""
