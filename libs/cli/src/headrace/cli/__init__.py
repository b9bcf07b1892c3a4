"""The `headrace` command: starts a whole system on one machine, talks to a running one, and looks into it."""
