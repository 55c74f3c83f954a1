"""Training by exchanges of edges: messages that may be late, workers that may be lost, join or be replaced."""
