"""Runs that go on without some of their processes: messages that may be late or lost, heartbeats, membership views, spawning."""
