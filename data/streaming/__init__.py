"""Raw text that is tokenised while training goes on: logical streams instead of shards.

The inputs are cut into units (data/raw), and these are dealt to `data.stream_count` = S logical streams: a matter of
inputs, S and seed alone. Global sample i is sample i div S of stream i mod S, and that is window i div S of the
stream's own endless text. So which sample comes when is a function of (inputs, S, seed, i): not of the layout, the
batch sizes or the length of training. A stream walks through its share in an order that the seed gives each epoch, and
starts over at its end.

data.stream_blend gives each source S streams of its own. Global stream s then is a blend of the sources' streams s, so
that who reads it reads no other stream of any source, and the weights hold in each stream and in each batch (turns).

Within a unit documents come as they stand: what mixes them is that S streams take turns, and the order of units. With
data.stream_shuffle = N each N documents of a stream that follow one another come in an order that the seed gives
(stream.mixed). Documents are mixed, not samples: then what shares a sample is mixed too, and a long document comes
whole. A rank holds N documents as ids for each stream that it has open, and tokenises N before a group's first one.
Documents that are to be mixed thoroughly are shuffled beforehand, or preprocessed (tools.preprocess --shuffle_docs).

dealing  units to shares            stream  a share's documents to windows, from a cursor on
turns    whose turn each sample is  source  windows of all streams, by stream and by global index
opening  inputs, tried out

A data rank opens the streams that its samples fall in; S / DP of them where S is a multiple of DP x micro-batch size.
Else several ranks read one stream, and each tokenises the others' samples only to skip them: the same samples, at
a cost that is said at the start. The first and the last pipeline stage, and context ranks, each read for themselves.

Validation takes the documents that a hash of their text gives it, by the weights of data.split: no document is in two
splits, and none is tokenised for one that it is not in. It is dealt to fewer streams where it is small, by a rule that
knows nothing of the layout, and an evaluation begins at their beginning.

A checkpoint holds for each stream of each source where its next sample begins (stream.Cursor), so that a resume, in any
layout, goes to it: by seeking in a plain file, by passing over rows or unpacking without parsing in another. Of a mixed
group it holds where the group begins and how many of it came before: at most N documents a stream are tokenised again.
"""
