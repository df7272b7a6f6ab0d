"""What the layers emit, made visible. Imports ports only.

metrics.py   Metrics: typed events -> Prometheus families, rendered as exposition text
"""
