"""The tables of mail that goes out: zones and routes, sources and times, changes and signatures."""
