"""HTTP for programs and people: metrics, health, the API and the operators' page."""
