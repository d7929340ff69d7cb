"""Grafana boards, alert rules and Prometheus files, generated from typed descriptions of what they show.

One file per board. `specserve dashboards` writes the files anew; they are committed, and a test says when they differ.
"""
