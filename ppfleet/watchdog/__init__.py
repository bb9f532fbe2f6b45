"""What a rank did last, and what notices when it stalls or dies: recorder, watchdog thread, diagnosis."""
