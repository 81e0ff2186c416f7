"""The table of settings: a row and its texts define everything about a setting. Does not need torch.

It is below `reports`, which may not import the bench: verdicts suggest settings, and the code for torch's
FSDPs, from the same rows that `explain` and the command line use.
"""

from fsdpbench.base.settings.setting import Effect, Setting, Trade, plain_text
from fsdpbench.base.settings.table import (
    SETTINGS,
    Settings,
    all_trades,
    read_list,
    setting_named,
    show_value,
    varied,
)
from fsdpbench.base.settings.values import TRUE_WORDS, Value
