"""Peers that run in this environment and do what a test needs; see specserve/bench/peer_servers/."""
