"""HTTP for machines and people: metrics, health."""
