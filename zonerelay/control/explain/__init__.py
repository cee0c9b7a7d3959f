"""`zonerelay explain`: how mail for an address would travel; no mail is sent."""
