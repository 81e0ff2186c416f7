"""The table of settings: a row and its texts define everything about a setting. Does not need torch.

    table.py        the rows, which are the fields of `Settings`; lookups
    settings.toml   each setting's explanation, the trade-offs of its values, the presets that sweep it
    setting.py      the classes of a row and a trade
    values.py       parsers of values
    code.py         settings written as Python code

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
