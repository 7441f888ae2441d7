"""From text to batches: tokenizer and corpus, checks of files on disk, batches shifted by depth.

batch.py             shifts that stop at document ends: tokens, labels and masks of every depth, created once per
                     batch; slices for context parallelism, and values d positions later, even on another rank
corpus.py            find, list, sample and read documents, and write .bin/.idx in parallel and atomically
sources.py           the source of every document of a corpus, to report acceptance by source
named_sources.py     sources of documents, by their lines, folders and files
prompts.py           prompts from starts of documents or user turns of chats, drawn by seed
samples.py           an append-only file of finished samples that survives kills
messages.py          normalize messages of published chats, or reject them; checks of rendered turns
chat.py              one chat, from a line of a file
chat_template.py     render and tokenize chats with the tokenizer's chat template; generation prompts
counted_tokens.py    which tokens of a chat are trained on: those that the model generates
chat_counts.py       what counts in a data set of chats, and how that is reported
chat_files.py        files of chats to .bin/.idx with modes
best_fit.py          pack documents into rows of one length; the order of rows in an epoch
tokenizer.py         load a tokenizer folder, or train a byte-level BPE; tokenize text and chats
sentence_pieces.py   a SentencePiece model with the interface of a transformers tokenizer
checks.py            is the corpus complete, does the vocabulary fit it; its most frequent tokens, for a draft
                     vocabulary
"""
