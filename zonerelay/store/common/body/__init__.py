"""Bodies on their way into a store. Each engine builds its own `BodyWriter` and `BodyCache`.

`writer` cuts a body into chunks, `chunks` checks what is stored, `cache` keeps the youngest bodies in memory.
"""
