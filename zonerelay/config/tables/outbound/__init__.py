"""The tables of mail that goes out: where it goes, from which addresses, when, and what is changed in it."""
