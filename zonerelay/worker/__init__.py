"""The worker: one process that is a whole relay. `worker` wires its parts; nothing else imports them all."""
