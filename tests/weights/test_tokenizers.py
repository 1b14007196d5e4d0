"""Tokenizers of both families: ids and texts as the libraries and transformers have them, whatever
a user types.
"""

import io
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Library
from transformers.tokenization_utils_base import generate_merges

from app.common.files import read_optional_json
from tests.refusal import refusal
from training.text import train_tokenizer
from weights.fetch import fetch
from weights.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind at all.",
    "Once upon a time there was a little fox who liked to count: 1, 2, 3, 10, 2024!",
    "def main():\n    return [x**2 for x in range(10)]\n\n\nprint(main())\n",
    "<html><b>start of turn</b>, end of turn</html> <|text|> </s> [INST] user model",
    "Füchse und Hunde: naïve façade — «café» œuvre, ελληνικά, русский, 日本語.",
] * 8
GEMMA_CONTROL = ["<start_of_turn>", "<end_of_turn>"]
GEMMA_TURNS = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('there is no system role') }}{% endif %}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
    "{{ message.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA_2_TURNS = (
    "{% for message in messages %}{% if message.role == 'user' %}{{ bos_token + '[INST] ' +"
    " message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + ' ' + eos_token }}{%"
    " endif %}{% endfor %}"
)
LLAMA_3_TURNS = (
    "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role"
    " }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>{% endfor"
    " %}<|start_header_id|>assistant<|end_header_id|>\n\n"
)


def write(folder: Path, **settings_: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(settings_))


def sentencepiece_model(model_type: str = "bpe", **options: Any) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        model_type=model_type,
        vocab_size=420,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
        **options,
    )
    return out.getvalue()


@cache
def llama_2_model() -> bytes:
    return sentencepiece_model(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)


@cache
def gemma_model() -> bytes:
    return sentencepiece_model(
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        add_dummy_prefix=False,
        user_defined_symbols=[*GEMMA_CONTROL, "\n\n", "▁▁", "<b>"],
    )


def bpe_of(model: bytes) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a sentencepiece model, as the tokenizers library wants them."""
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    vocabulary = {library.IdToPiece(number): number for number in range(library.GetPieceSize())}
    return vocabulary, generate_merges(vocabulary)


def llama_2_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(llama_2_model())
    write(
        folder, add_bos_token=True, bos_token="<s>", eos_token="</s>", chat_template=LLAMA_2_TURNS
    )


def llama_2_json(
    folder: Path, added: tuple[AddedToken, ...] = (), chat_template: str = LLAMA_2_TURNS
) -> None:
    """As transformers 4 converted it: a normalizer puts the mark before every stretch of text."""
    vocabulary, merges = bpe_of(llama_2_model())
    library = Library(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    library.add_special_tokens(
        [AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")] + [*added]
    )
    library.save(str(folder / "tokenizer.json"))
    write(
        folder,
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>"},
        chat_template=chat_template,
    )


def phi_3(folder: Path) -> None:
    """Blanks after a control token belong to it, and some other rules."""
    added = (
        AddedToken("<|user|>", rstrip=True, normalized=False),
        AddedToken("<|assistant|>", rstrip=True, lstrip=True, normalized=False),
        AddedToken("<|end|>", rstrip=True, normalized=False),
        AddedToken("turn", single_word=True, normalized=False),
    )
    turns = (
        "{% for message in messages %}<|{{ message.role }}|>\n {{ message.content }}  <|end|>\n"
        " {% endfor %}return turn  <|assistant|>\n"
    )
    llama_2_json(folder, added, turns)


def save_by_transformers_5(
    folder: Path,
    kind: type[transformers.PreTrainedTokenizerFast],
    model: bytes,
    turns: str,
    control: Sequence[str] = (),
    added: Sequence[str] = (),
    **options: str,
) -> None:
    vocabulary, merges = bpe_of(model)
    tokenizer = kind(vocab=vocabulary, merges=merges, add_bos_token=True, **options)
    tokenizer.add_special_tokens({"additional_special_tokens": [*control]})
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in added])
    tokenizer.chat_template = turns
    tokenizer.save_pretrained(folder)


def gemma_sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.model").write_bytes(gemma_model())
    write(
        folder,
        add_bos_token=True,
        added_tokens_decoder={
            "4": {"content": GEMMA_CONTROL[0], "special": True},
            "5": {"content": GEMMA_CONTROL[1], "special": True},
            "6": {"content": "\n\n", "special": False},
        },
        chat_template=GEMMA_TURNS,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
    )


def llama_3(folder: Path) -> None:
    control = [
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ]
    words = Regex(r"\s?\p{L}+|\p{N}{1,3}|[^\p{L}\p{N}\s]+|\s+")
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens([AddedToken(name, normalized=False) for name in control])
    # plain text that no piece spells like this
    library.add_tokens([AddedToken("日本", normalized=False)])
    begin = processors.TemplateProcessing(
        single=f"{control[0]} $A", special_tokens=[(control[0], library.token_to_id(control[0]))]
    )
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), begin])
    library.save(str(folder / "tokenizer.json"))
    write(
        folder,
        tokenizer_class="PreTrainedTokenizerFast",
        chat_template=LLAMA_3_TURNS,
        bos_token=control[0],
        eos_token=control[-1],
    )


KINDS = {
    "llama-2, sentencepiece": llama_2_sentencepiece,
    "llama-2, json": llama_2_json,
    "llama-2, transformers 5": lambda folder: save_by_transformers_5(
        folder, transformers.LlamaTokenizer, llama_2_model(), LLAMA_2_TURNS
    ),
    "gemma, sentencepiece": gemma_sentencepiece,
    "gemma, json": lambda folder: save_by_transformers_5(
        folder,
        transformers.GemmaTokenizer,
        gemma_model(),
        GEMMA_TURNS,
        GEMMA_CONTROL,
        ["\n\n", "▁▁", "<b>"],
        mask_token="<unk>",
    ),
    "llama-3": llama_3,
    "phi-3": phi_3,
    "smollm2": lambda folder: copy_of(fetch(), folder),
    "of train.py": lambda folder: train_tokenizer(CORPUS, 300, folder),
}
SENTENCEPIECE_TWIN = {
    "llama-2, sentencepiece": "llama-2, json",
    "gemma, sentencepiece": "gemma, json",
}
OF_WORD_ENDS = {
    "model": {"type": "BPE", "end_of_word_suffix": "</w>", "vocab": {"e</w>": 0}, "merges": []},
    "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
}
KINDS_OF_DECODER = "none of the kinds that this project reads, ByteLevel and Sentencepiece"
every_kind = pytest.mark.parametrize("kind", KINDS, scope="module")
over_texts = settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = {kind: tmp_path_factory.mktemp("tokenizer") for kind in KINDS}
    for kind, make in KINDS.items():
        make(made[kind])
    return made


# "▁" is a space to sentencepiece, before and after: the one character that does not come back as
# itself.
characters = st.characters(exclude_categories=["Cs"], exclude_characters="▁")
FRAGMENTS = (
    "the| fox|  |   |\n|\n\n| <b>|<|s>|é|日本|語|👩\u200d👩\u200d👧|🇫🇷|👍🏽"
    "|e\u0301|\u0301|\ufeff|\u00a0|हिन्दी|ไทย|العربية|한국어|<0x41>|\0|\x7f|\ud7ff|\uffff|12345|3.14|1e-9|½|ﬁ|I'll|\r\n|\t"
)
fragments = st.sampled_from(FRAGMENTS.split("|"))
USER = {"role": "user", "content": "a"}
SEVERAL = [
    {"name": "tool_use", "template": "x"},
    {"name": "default", "template": "{{ messages[0].content }}!"},
]
plain_texts = st.lists(fragments | st.text(characters, max_size=6), max_size=8).map("".join)


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path], kind: str) -> Tokenizer:
    return Tokenizer(folders[kind])


@pytest.fixture
def changed(folders: dict[str, Path], tmp_path: Path) -> Callable[..., Tokenizer]:
    """Read a copy of one tokenizer in ``tmp_path``, with some settings changed."""
    settings_ = copy_of(folders["llama-3"], tmp_path)

    def read(**changes: Any) -> Tokenizer:
        write(tmp_path, **settings_ | changes)
        return Tokenizer(tmp_path)

    return read


@pytest.fixture(scope="module")
def oracle(folders: dict[str, Path], kind: str) -> Any:
    """transformers' tokenizer of the kind. It cannot read tokenizer.model alone, so the twin in
    json stands in.
    """
    twin = folders[SENTENCEPIECE_TWIN.get(kind, kind)]
    return transformers.PreTrainedTokenizerFast.from_pretrained(twin)


@every_kind
@over_texts
@given(data=st.data())
def test_a_text_comes_back_from_its_tokens_which_are_those_of_transformers(
    tokenizer, oracle, kind, data
):
    """The name of a control token is text, unless names are looked for. Inside another text, no
    space comes before it.
    """
    named = st.sampled_from([*sorted(tokenizer.special), "<", "|>"])
    text = data.draw(st.lists(named | plain_texts, max_size=5).map("".join))
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text, split_special_tokens=True)
    assert tokenizer.encode(text, find_names=True) == oracle.encode(text)
    # that one gives "a" and " a" equal ids
    assume(not (kind == "llama-2, transformers 5" and text.startswith(" ")))
    # SmolLM2's vocabulary lacks some bytes, such as those of control characters
    assume(set(text.encode()) <= set(b"".join(tokenizer.pieces)))
    assert tokenizer.decode(ids) == text
    space = b" " if text and tokenizer.adds_space else b""
    assert b"".join(map(tokenizer.token_bytes, ids)) == space + text.encode()
    inside = tokenizer.encode_continuation(text)
    assert b"".join(map(tokenizer.token_bytes, inside)) == text.encode()


@pytest.mark.parametrize(
    ("kind", "model"),
    [("llama-2, sentencepiece", llama_2_model), ("gemma, sentencepiece", gemma_model)],
    scope="module",
)
@settings(max_examples=150)
@given(
    text=st.lists(
        fragments | st.sampled_from([*CORPUS, "▁", "<b>", "</s>"]) | st.text(max_size=6)
    ).map("".join)
)
def test_ids_of_a_text_are_those_of_the_sentencepiece_library(tokenizer, model, text):
    """Its own, but for the names of control tokens, which no text here holds."""
    library = sentencepiece.SentencePieceProcessor(model_proto=model())
    assert tokenizer.encode_parts(text) == library.EncodeAsIds(text)


@every_kind
@over_texts
@given(data=st.data())
def test_any_tokens_that_spell_a_text_spell_that_of_transformers(tokenizer, oracle, data):
    ids = data.draw(st.lists(st.integers(0, len(tokenizer.pieces) - 1), max_size=9))
    spelt = b"".join(map(tokenizer.token_bytes, ids))
    assume(spelt == spelt.decode(errors="replace").encode())
    how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    assert tokenizer.decode(ids) == oracle.decode(ids, **how)


@every_kind
@pytest.mark.parametrize("adds", [True, False])
def test_add_bos_token_in_the_settings_wins(folders, kind, adds, tmp_path):
    settings_ = copy_of(folders[kind], tmp_path)
    write(tmp_path, **settings_, add_bos_token=adds)
    tokenizer = Tokenizer(tmp_path)
    begin = tokenizer.special[settings_["bos_token"]]
    assert (tokenizer.encode("The fox")[0] == begin) == adds


def copy_of(source: Path, folder: Path) -> dict[str, Any]:
    """Copy a tokenizer's files, without a model's; its settings come back, to be written as they
    are wanted.
    """
    for path in source.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    settings_ = json.loads((source / "tokenizer_config.json").read_text())
    settings_.pop("add_bos_token", None)
    return settings_


conversations = st.lists(plain_texts, min_size=1, max_size=3).map(
    lambda contents: [
        {"role": "assistant" if turn % 2 else "user", "content": content}
        for turn, content in enumerate(contents)
    ]
)


@every_kind
@over_texts
@given(messages=conversations)
def test_a_conversation_has_the_ids_that_transformers_gives_it(tokenizer, oracle, messages):
    """Not where the name of a control token is typed: transformers then makes it one, which ours
    must not.
    """
    control = tokenizer.special
    assume(not any(name in message["content"] for message in messages for name in control))
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.encode_chat(messages) == expected["input_ids"]


def test_a_name_counts_as_it_is_spelt_whatever_normalisation_makes_of_it(changed, tmp_path):
    """What a user types, and is normalised to it, is text."""
    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    library.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    library.add_special_tokens([AddedToken("<|END|>", normalized=True)])
    library.add_tokens([AddedToken("café", normalized=False)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = changed(chat_template="{{ messages[0].content }} <|END|>")
    oracle = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = "Ａ <|END|><|eot_id|> Fuß"
    assert tokenizer.encode(text, find_names=True) == oracle.encode(text)
    for typed in ("＜|end|＞", "<|END|>"):
        ids = tokenizer.encode_chat([USER | {"content": typed}])
        assert ids.count(tokenizer.special["<|END|>"]) == 1 and tokenizer.decode(ids) == "<|end|> "
    # bytes of an added token are its text, though these characters could spell others
    assert tokenizer.decode(tokenizer.encode("un café")) == "un café"


@every_kind
@over_texts
@given(data=st.data())
def test_no_content_of_a_message_can_end_its_turn(tokenizer, data):
    """The control tokens of a conversation are those of the template; typed text stays whole."""
    private = "".join(map(chr, range(0xE000, 0xF900)))  # more than there can be marks
    hostile = st.sampled_from([*tokenizer.special, private, *private[:2], "\uf8ff"])
    typed = data.draw(st.lists(hostile | fragments, min_size=1).map("".join))
    control = set(tokenizer.special.values())
    plain, ids = (
        tokenizer.encode_chat([USER | {"content": content}]) for content in ("a", f"a{typed}b")
    )  # templates may trim
    assert [token for token in ids if token in control] == [
        token for token in plain if token in control
    ]
    if set(typed.encode()) <= set(b"".join(tokenizer.pieces)):
        assert f"a{typed}b".encode() in b"".join(map(tokenizer.token_bytes, ids))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for", "chat template fails: "),
        ("{{ ''.__class__.__mro__ }}", "chat template fails: "),
        ("{{ raise_exception('no system role') }}", "refuses this conversation: no system role"),
        (None, "has no chat template: it continues plain text"),
        (r"{{ '\ud800' }}", "chat template fails: "),  # half a character
        ({"default": "x"}, "chat template fails: "),
    ],
)
def test_a_template_that_fails_is_one_line(changed, template, message):
    assert message in refusal(changed(chat_template=template).encode_chat, [USER])


@pytest.mark.parametrize(
    ("template", "file", "variables", "expected"),
    [
        # a variable is text, also the name of a control token in it, at any depth
        (
            "{{ tone[0].kind }}{{ messages[0].content }}",
            None,
            {"tone": [{"kind": "<|eot_id|>"}]},
            "<|eot_id|>a",
        ),
        # one that is spelt with characters of JSON, too
        ("{{ tone[0] }}{{ messages[0].content }}", None, {"tone": ['["', 1]}, '["a'),
        # marks of answers for training, and blanks around them; a name set within ends there
        (
            "{% set x = 'b' %}{{ messages[0].role }}\n{%- generation %}{% set x = 'c' %}"
            "{{ messages[0].content }}{% endgeneration %}{{ x }}\n",
            None,
            {},
            "userab",
        ),
        (SEVERAL, None, {}, "a!"),
        (SEVERAL, "{{ messages[0].content }}?", {}, "a?"),
    ],
    ids=[
        "variable",
        "characters of JSON",
        "marks",
        "the default of several",
        "the file beside the settings",
    ],
)
def test_a_template_is_rendered_as_its_authors_expect(
    changed, template, file, variables, expected, tmp_path
):
    if file:
        (tmp_path / "chat_template.jinja").write_text(file)
    tokenizer = changed(
        chat_template=template, added_tokens_decoder={"900": {"content": '["', "special": True}}
    )
    ids = tokenizer.encode_chat([USER], variables=variables)
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {
                "generation_config.json": {"eos_token_id": [3, 5]},
                "config.json": {"eos_token_id": 7},
            },
            {3, 5},
        ),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 7}}, {7}),
        ({"generation_config.json": {"eos_token_id": []}}, {"<|eot_id|>"}),
        ({"config.json": {"eos_token_id": [7, 9]}}, {7, 9}),
        ({"config.json": {"eos_token_id": None}}, {"<|eot_id|>"}),
        ({}, {"<|eot_id|>"}),
    ],
)
def test_a_text_ends_at_every_id_that_the_folder_names(changed, tmp_path, files, expected, capsys):
    """A line says so where the template's end of turn is none of them."""
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = changed()
    assert tokenizer.eos_ids == {tokenizer.special.get(end, end) for end in expected}
    said = f"add {tokenizer.special['<|eot_id|>']} to eos_token_id in its generation_config.json"
    assert (said in capsys.readouterr().err) == ("<|eot_id|>" not in expected)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama-2, sentencepiece", "<|im_end|>"), ("gemma, json", "<b>")],
    scope="module",
)
def test_tokens_that_the_settings_add_or_list_are_control_tokens(
    folders, kind, name, tokenizer, tmp_path
):
    """Published files disagree at times: a control token of either file cannot be typed, and the
    settings say which blanks belong to it.
    """
    pieces = [*tokenizer.pieces, name.encode()]
    number = pieces.index(name.encode())
    more = {
        "added_tokens_decoder": {str(number): {"content": name, "special": True, "rstrip": True}},
        "chat_template": "{{ messages[0].content }}" + name + "\n\n ",
    }
    write(tmp_path, **copy_of(folders[kind], tmp_path) | more)
    after = Tokenizer(tmp_path)
    typed = after.encode(f"a{name}c")
    assert after.decode(typed) == f"a{name}c" and number not in typed
    assert after.encode_chat([USER])[-1] == number and not any(
        map(after.token_bytes, (number, -1, len(after.pieces)))
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, "holds no tokenizer.json and no tokenizer.model"),
        ("tokenizer.json", b'{"version": ', "tokenizer.json is not a tokenizer that can be read"),
        ("tokenizer.json", OF_WORD_ENDS, KINDS_OF_DECODER),
        (
            "tokenizer.json",
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            KINDS_OF_DECODER,
        ),
        ("tokenizer.json", {"decoder": None}, KINDS_OF_DECODER),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json must hold one JSON object"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja cannot be read"),
        *(
            (
                name,
                {"eos_token_id": eos},
                f"{name}: eos_token_id must be a token id or a list of them, found ",
            )
            for name in ("config.json", "generation_config.json")
            for eos in ("2", [2.5], -1, {}, [[1]])
        ),
        *(
            ("tokenizer_config.json", {key: value}, "tokenizer_config.json is damaged: ")
            for key, value in [
                ("chat_template", [5]),
                ("chat_template", [{"name": "x"}]),
                ("eos_token", {"text": "x"}),
                ("eos_token", ["x"]),
                ("bos_token", 5),
                ("added_tokens_decoder", {"1": 5}),
                ("added_tokens_decoder", {"1": {"content": 5, "special": True}}),
                ("added_tokens_decoder", {"x": {"content": "x", "special": True}}),
                ("added_tokens_decoder", [1]),
            ]
        ),
    ],
    ids=str,
)
def test_a_damaged_file_is_named_in_one_line(folders, tmp_path, name, content, message):
    """An absent one, one of other bytes, or one with other fields."""
    copy_of(folders["llama-3"], tmp_path)
    path = tmp_path / name
    if isinstance(content, dict):
        content = json.dumps(read_optional_json(path) | content).encode()
    path.unlink(missing_ok=True)
    if content is not None:
        path.write_bytes(content)
    assert message in refusal(Tokenizer, tmp_path)


def test_a_sentencepiece_file_without_merges_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model("unigram"))
    assert "tokenizer.model is no byte-pair encoding" in refusal(Tokenizer, tmp_path)
