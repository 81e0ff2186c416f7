"""Where outcomes of ``FullyShardedDataParallel`` differ from torch's on purpose: see docs/impl-fsdp1.md."""

from __future__ import annotations

from outcomes.rows import Known

DOCUMENT = "docs/impl-fsdp1.md"
INSIDE = "AttributeError|KeyError|TypeError|done"
ARGUMENTS = "process groups and settings of the wrong kind"
CHANGES = "parameters written, replaced or given new data between forward and backward"
FROZEN = "freezing a whole unit between forward and backward"
NAMED = "refuses states of parameters that the model does not have"
STRUCTURE = "a structure that no optimizer has"
FILLED = "refuses a state that only some of its parameters have"

KNOWN = [
    # -- wrapping --
    Known("group_.*", INSIDE, "ValueError", ARGUMENTS),
    Known("(strategy|setting)_.*", INSIDE, "ValueError", ARGUMENTS),
    Known("policy_of_(no_class|text|instance)", INSIDE, "ValueError", "an empty `ModuleWrapPolicy`"),
    Known("init_fn_number_unused", "done", "ValueError", "a `param_init_fn` that is not callable"),
    Known("init_fn_none_and_no_reset", "AttributeError.*", "ValueError", "without `reset_parameters()`"),
    Known("mesh_(two|three)_FULL_SHARD", "done.*", "ValueError", "a 2-D `device_mesh`"),
    Known("scalar", "ValueError", "done", "scalar and integer parameters"),
    Known("setting_sync_text", "ValueError", "done", "`sync_module_states` on a CPU"),
    Known(
        "optimizer_in_backward_(before|between)", "done.*", "RuntimeError",
        "attached before wrapping with `use_orig_params=False`",
    ),
    Known("enable_wrap_nested", "NotImplementedError", "done", "`enable_wrap` inside of `enable_wrap`"),
    # -- calls --
    Known("(no_sync|clip)_in_(forward|backward)", "done: ValueError", "done: done.*", "a failed iteration"),
    Known(
        "optim_in_(forward|backward)(_of_a_unit_inside)?", ".*", "done: (RuntimeError|done)",
        "`optim_state_dict` inside of forward or backward",
    ),
    Known("summon_grads", "NotImplementedError", "done", "`summon_full_params(with_grads=True)`"),
    Known(
        "summon_inner_then_forward|hook_on_a_unit_then_forward|hook_before_wrapped_again",
        "AssertionError|.*'AssertionError'.*", "done.*", "a wrapper inside that was used before its root",
    ),
    Known("backward_twice", "RuntimeError", "done", "a second backward through one graph"),
    Known("forward_in_summon", "done", "AssertionError", "forward inside of `summon_full_params`"),
    Known("parameter_of_other_size", "RuntimeError", "AssertionError", "new data of another shape"),
    Known("deep_copy", "RuntimeError", "TypeError", "`copy.deepcopy` of a wrapper"),
    Known("written_.*", "done|AttributeError", "(Runtime|Assertion)Error", CHANGES),
    Known("written_re(placed|moved)_.*", "done|AttributeError", "ValueError", CHANGES),
    Known("written_frozen_.*", "(Runtime|Assertion)Error", "done", FROZEN),
    # -- state dicts --
    Known("optimizer_.*(names|name)", "done|.*Error", "ValueError", NAMED),
    Known("optimizer_.*_(nested_once_more|outer_nested|swapped)", "done|KeyError", "ValueError", NAMED),
    Known("optimizer_rekey_extra_value", "KeyError", "ValueError", NAMED),
    Known("optimizer_.*_(in_a_list|(one_)?value_nested)", "done|.*Error", "ValueError", STRUCTURE),
    Known("optimizer_.*_group_params_text", "KeyError", "ValueError", STRUCTURE),
    Known("optimizer_rekey_(state_is_list|groups_are_one)", "(Attribute|Type)Error", ".*Error", STRUCTURE),
    Known("optimizer_.*_(other_shape|step_tensor_1d)", "done|RuntimeError", "ValueError", STRUCTURE),
    Known("optimizer_.*_(one_missing|value_is_none)", "done", "ValueError", FILLED),
    Known("save_optimizer_of_.*", "(Key|Attribute)Error", "ValueError", "refuses a model without wrappers"),
    Known("(get_)?type_of_a_plain_model", "done", "ValueError", "refuses a model without wrappers"),
    Known("type_text", "KeyError", "ValueError", ARGUMENTS),
    Known("types_mixed_set", "AssertionError", "done", "wrappers with different types"),
    Known("load_.*_SHARDED_STATE_DICT_.*", "AssertionError", "RuntimeError", "values of another shape"),
    Known("load_between", "done", "RuntimeError", CHANGES),
    Known("no_shard_FULL_STATE_DICT", ".*Warning.*", "done: .'done', 'done'.", "and a warning"),
    Known("in_summon_.*", "done.*", "done: RuntimeError", "saved; sharded ones raise RuntimeError"),
]  # fmt: skip
