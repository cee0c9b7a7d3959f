"""The relay's HTTP server: metrics, health checks, the API and the operators' web page."""
