"""[[listener]], [auth] and [[access]]: the tables of mail that comes in."""
