"""The proof that limits hold: a relay under full load, as its receivers see it."""
