"""Built-in prompts by kind of task, since the speed of drafts depends on it.

Each is a user's turn of a chat; a model without a chat template continues it as text.
"""

LIGHTHOUSE = (
    "The lighthouse on Gull Rock was built in 1871 by the harbour company of Wexmouth. Its lamp burned rape "
    "oil at first and could be seen from eleven miles away. In 1902 the company replaced the lamp with a "
    "paraffin burner, and in 1934 with an electric light that needed no keeper at night. The last keeper, "
    "Thomas Arkwell, left the rock in 1951. Since then the lighthouse has run by itself, and a boat visits it "
    "twice a year to clean the glass and to count the seals."
)
BREAD = (
    "Sourdough bread rises without bought yeast. The baker keeps a jar of flour and water, called a starter, "
    "in which wild yeast and bacteria live. Fed with fresh flour every day, the starter bubbles and smells "
    "faintly of apples. To bake, the baker mixes a spoonful of it into dough, waits through a long night, "
    "shapes the loaf in the morning and puts it into a very hot oven. The crust turns brown and crackles as "
    "it cools."
)
MEETING = (
    "The meeting began at nine. Anna reported that the new pump works but is louder than the old one. Ben asked "
    "for a quieter fan and offered to test two of them by Friday. Carla said that the budget allows one fan "
    "only. They agreed that Ben tests both fans, that Anna measures the noise, and that Carla orders the better "
    "one on Monday. The next meeting is on the twelfth."
)
LETTER = (
    "Dear Mr. Holm, thank you for your letter of the third of May. We are sorry that the clock arrived with a "
    "broken glass. We have sent you a new glass today, and it should reach you within a week. Please keep the "
    "old glass until the new one has come. If the clock should be slow, turn the small screw at the back to "
    "the left. With kind regards, Ida Berg."
)

PROMPTS: dict[str, list[str]] = {
    "story": [
        "Tell me a short story about a fox who learns to share.",
        "Write a story about a girl who finds a door in an old tree.",
        "Tell a story for children about a small boat that is afraid of the sea.",
        "Write a short story in which a clockmaker repairs a clock that runs backwards.",
    ],
    "question": [
        "Why is the sky blue during the day and red in the evening?",
        "What is the difference between weather and climate?",
        "How does a refrigerator keep food cold?",
        "Why do leaves change their colour in autumn?",
    ],
    "code": [
        "Write a Python function that returns the n-th Fibonacci number without recursion.",
        "Write a Python function that checks whether a string is a palindrome, with a docstring.",
        "Write a Python class for a stack with push, pop and peek methods.",
        "Write a Python function that counts how often each word occurs in a text file.",
    ],
    "summary": [
        f"Summarise this text in two sentences.\n\n{LIGHTHOUSE}",
        f"Summarise this text in two sentences.\n\n{BREAD}",
        f"Summarise these minutes in two sentences.\n\n{MEETING}",
        f"Summarise this letter in two sentences.\n\n{LETTER}",
    ],
    "rewriting": [
        f"Repeat this text word for word, but write 1880 in place of 1871.\n\n{LIGHTHOUSE}",
        f"Repeat this text word for word, but write 'cook' in place of 'baker'.\n\n{BREAD}",
        f"Repeat these minutes word for word, but write Dora in place of Carla.\n\n{MEETING}",
        f"Repeat this letter word for word, but write June in place of May.\n\n{LETTER}",
    ],
    "chat": [
        "Hi! I am planning a picnic for six people. What should I bring?",
        "I slept badly and have a long day ahead. Any advice?",
        "My neighbour's cat visits me every day. Is that normal?",
        "Can you help me to find a name for a small bakery?",
    ],
}
