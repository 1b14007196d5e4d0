"""Chat templates: the text of a conversation, by the Jinja template of a model.

A template finds the variables, filters and tags that transformers gives it. Knows nothing of token
ids.
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from model.errors import InputError, explaining

# a tag around an answer, which marks it for training
GENERATION_TAG = re.compile(r"({%[-+]?\s*(?:end)?)generation(\s*[-+]?%})")


def default_template(template: Any) -> str | None:
    """Return the template for plain chat: the only one, or of several by name the default."""
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template


def render(
    template: str,
    messages: Sequence[Mapping[str, str]],
    names: Mapping[str, str],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """Return the text of a conversation, by default up to the beginning of an answer, with
    ``names`` of control tokens by role.

    ``variables`` are more of the template's, such as "enable_thinking". Raises InputError if the
    template fails, refuses the conversation or does not read a variable, and for a variable that is
    set here.
    """

    def refuse(message: str) -> None:
        raise InputError(f"the model's chat template refuses this conversation: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    # a template can raise any error
    with explaining("the model's chat template fails", (Exception,)):
        source = GENERATION_TAG.sub(r"\1with\2", template)  # both are a scope
        reserved = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            "raise_exception": refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
            **names,
        }
        for name in sorted(variables.keys() & reserved.keys()):
            raise InputError(
                f"the chat template's variable {name!r:.80} is set already: leave it out",
                "chat_template_kwargs",
            )
        for name in sorted(variables.keys() - find_undeclared_variables(environment.parse(source))):
            raise InputError(
                f"the chat template has no variable {name!r:.80}", "chat_template_kwargs"
            )
        text = environment.from_string(source).render(reserved | variables)
        text.encode()  # fails for half of a surrogate pair
        return text


def to_json(value: Any, ensure_ascii: bool = False, **more: Any) -> str:
    """Return JSON, as the filter of transformers does: Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **more)
