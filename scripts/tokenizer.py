"""The tokenizer of a GGUF file: byte-level BPE, built with the `tokenizers` library from the file's metadata."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

# Values of tokenizer.ggml.token_type (llama.cpp, enum llama_token_type): markup such as <|im_end|>; words added whole.
CONTROL, USER_DEFINED = 3, 4

# How Llama 3 cuts a text into words before BPE (meta-llama/llama3, llama/tokenizer.py).
LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
                r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def _pre_tokenizer(name):
    """How a text is cut into words before BPE; None for a name that is not known here."""
    gpt2_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "default"):
        return gpt2_words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_words])
    if name == "llama-bpe":
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_WORDS), "isolated"), bytes_only])
    return None


def load_tokenizer(file):
    """The tokenizer of a model.

    Parameters
    ----------
    file : GGUFFile
        The model's file.

    Returns
    -------
    tokenizers.Tokenizer
        ``encode(text).ids`` knows the control tokens (such as ``<|im_end|>``) and puts the begin-of-text token in
        front where the model wants it; ``decode(ids)`` leaves the control tokens out.

    Raises
    ------
    ModelFileError
        If the file has no byte-level BPE vocabulary, or one whose words are cut in a way not known here.
    """
    algorithm = file.value("tokenizer.ggml.model", str)
    if algorithm != "gpt2":
        raise file.error(f"its tokenizer is {algorithm!r}; only 'gpt2' (byte-level BPE) is supported")
    name = file.value("tokenizer.ggml.pre", str, "default")
    pre_tokenizer = _pre_tokenizer(name)
    if pre_tokenizer is None:
        raise file.error(f"its pre-tokenizer {name!r} is not supported; 'smollm', 'gpt-2' and 'llama-bpe' are")
    texts = file.texts("tokenizer.ggml.tokens")
    vocabulary = {text: token for token, text in enumerate(texts)}
    merges = [tuple(merge.split(" ")) for merge in file.texts("tokenizer.ggml.merges")]
    try:
        # Llama 3 takes a word that is in the vocabulary whole, whatever its merges say.
        bpe = models.BPE(vocabulary, merges, ignore_merges=name == "llama-bpe")
    except Exception as error:  # the library raises Exception itself
        raise file.error(f"is damaged: its merges do not fit its vocabulary: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    types = file.value("tokenizer.ggml.token_type", list, [])
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(text, normalized=False) for text, its_kind in zip(texts, types) if its_kind == kind])
    if file.value("tokenizer.ggml.add_bos_token", bool, False):
        begin = file.value("tokenizer.ggml.bos_token_id", int)
        if not 0 <= begin < len(texts):
            raise file.error(f"metadata key 'tokenizer.ggml.bos_token_id' must be below {len(texts)}, got {begin}")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{texts[begin]} $A", special_tokens=[(texts[begin], begin)])
    return tokenizer


def end_tokens(file):
    """The ids after which a text is over: the end tokens that the metadata names, and all markup, which is not text."""
    markup = {token for token, kind in enumerate(file.value("tokenizer.ggml.token_type", list, [])) if kind == CONTROL}
    named = {file.value(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot")}
    return markup | (named - {None})
