"""The table of settings: a row and its texts say everything that is known of one. Needs no torch.

    table.py        the rows, which are the fields of `Settings`; lookups
    settings.toml   what people should know of each, what its values trade, the presets that sweep it
    setting.py      what a row and a trade are
    values.py       how a text becomes a value
    code.py         how a value is written as code

It is below `reports`, which may not import the bench: verdicts suggest settings, and how torch's FSDPs write
them, from the same rows that `explain` tries and the command line takes.
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
