"""One function per mail event: the fields of its log line and the counters it moves."""
