"""Mail that applications insert into a table of their own PostgreSQL database."""
