"""The static model, and the runtimes it is compared with."""
