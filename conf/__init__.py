"""What a run is: typed configuration, cross-group rules, stage contracts, the run folder and its
events.
"""

import os

# Threads of a CPU wait for each other in a loop, by default for milliseconds. Where another process
# keeps one of their cores busy, the thread they wait for then gets no core at all: a decoding step
# of 11 ms takes 53 to 65 beside one busy process, and 26 when whoever waits soon goes to sleep.
# Alone it takes as long either way. Read when torch is imported; this room loads before it.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
