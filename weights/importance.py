def importance(model, tokenizer, folder):
    """Stub until the real file is merged."""
