"""Request -> rendered prompt -> token ids, exactly as the engine will compute them.

Start here: `local.LocalTokenizer` (one model's template and tokenizer), `backends` (what the gateway calls),
`segments` (why a long chat is cheap), `probe` (whether a model's template keeps its history).
"""
