"""Requests for children's stories: sentence forms with blanks, and words to fill them, from ``templates.json``.

Forms that state a length get stories with an end. Without one a small model writes until it repeats itself. Openings
are beginnings for the model to continue: so each story names its subject in its first words.
"""

import json
import random
from pathlib import Path

TEMPLATES: dict[str, list[str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def story_request(rng: random.Random) -> tuple[str, str, list[str]]:
    """A prompt, the opening of its story, and the subjects that this should name: the last word of each blank.

    Forms of prompt and opening are random, and filled with the same random words.
    """
    form = rng.choice(TEMPLATES["form"])
    blanks = {name: rng.choice(TEMPLATES[name]) for name in ("who", "where", "thing", "lesson", "feeling")}
    subjects = [phrase.split()[-1] for name, phrase in blanks.items() if "{" + name + "}" in form]
    return form.format(**blanks), rng.choice(TEMPLATES["opening"]).format(**blanks), subjects
