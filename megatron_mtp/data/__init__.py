"""From text to batches: tokenizer and corpus, checks of what is on disk, batches shifted per depth.

batch.py             shifts, which stop at the end of a document: tokens, labels and masks of every depth, made once
                     a batch; their cut for context parallelism, and values d positions later, also on another rank
corpus.py            documents found, listed, chosen, read, and made .bin/.idx in parallel, written beside and renamed
sources.py           the source of every document, by which acceptance is measured apart
prompts.py           beginnings of documents, or the user's turns of chats, drawn by seed
samples.py           the file of finished continuations, which kills do not harm
messages.py          messages of published chats in one form, or refused by name; does a rendered turn hold them
chat.py              a chat: a line of a file, in that form
chat_template.py     chats as texts and tokens by the tokenizer's chat template, and what it puts before a turn
counted_tokens.py    which tokens of a chat count: those that the model writes
chat_files.py        files of chats made .bin/.idx with modes, and the lines that say what is not trained on
best_fit.py          documents packed into rows of one length
tokenizer.py         load a tokenizer folder, or train a byte-level BPE; texts to tokens, chats to texts
sentence_pieces.py   a SentencePiece model behind the names of a transformers tokenizer
checks.py            is the corpus there and whole, does the vocabulary fit it; its most frequent tokens, which MTP
                     layers may draft
"""
