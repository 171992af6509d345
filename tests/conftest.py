"""Before anything else is imported: no network, no dashboards, quiet tokenizers."""

import os

from hypothesis import settings

# Libraries read these once, when they are imported: import none of them above this line.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    TOKENIZERS_PARALLELISM="false",
)

# The same examples in every run, and no limit on time: the machine may be busy.
settings.register_profile("draftsmith", deadline=None, derandomize=True)
settings.load_profile("draftsmith")
