"""What a run is: typed configuration, cross-group rules, stage contracts, the run folder and its
events.
"""
