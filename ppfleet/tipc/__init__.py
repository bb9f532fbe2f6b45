"""TIPC (Training and Inference Pipeline Certification): parse a text file, plan its commands, run them, report.

config.py -> plan.py -> run.py -> report.py; lint.py explains what is wrong with a file. Imports no training code.
"""
