"""What a run is: typed configuration, cross-group rules, stage contracts, the run folder and its
events.
"""

import os

# Threads of a CPU wait for each other in a loop, by default for milliseconds. Where another process
# keeps one of their cores busy, the one they wait for then gets no core at all: a decoding step of 11
# ms took 53 to 65 beside one busy process, and takes 26 when whoever waits soon goes to sleep. Alone it
# takes as long either way. It is read when torch is imported, so it stands in the first room to load.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
