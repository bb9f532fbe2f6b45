"""What a rank did last, and who notices when it stands still or dies: recorder, watchdog thread, diagnosis."""
