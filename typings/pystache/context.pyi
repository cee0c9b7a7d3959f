class KeyNotFoundError(Exception):
    key: str
