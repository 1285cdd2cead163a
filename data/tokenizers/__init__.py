"""Text to ids and back.

base                    what all have: ids, texts, special tokens; the byte tokenizer, and one of any file
kinds                   which one a file or folder holds
tokenizer_json          Hugging Face's, by their library
gpt2_pair               vocab.json and merges.txt as a tokenizer.json
tiktoken_ranks          tiktoken's files; tiktoken_meta, what Meta's code adds to its own
sentencepiece_training  the built-in one's model, trained once
vocabulary              what any vocabulary must be like
engines                 many documents at speed, proved to be its ids: sentencepiece_engine, tiktoken_engine
"""
