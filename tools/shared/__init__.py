"""What several tools share.

carried_tokenizer   a Hugging Face folder's tokenizer, as training opens it; which ids begin and end a text
checked_checkpoint  a checkpoint, of which no damaged byte is taken
dtypes              elements of one dtype as another's
held_checkpoint     a checkpoint that nothing deletes meanwhile
hf_folder           a Hugging Face folder, to read
loaded_model        a model with a checkpoint's weights, on ranks; opened_checkpoint comes before ranks start
part_files          a checkpoint's tensors in files of bounded size
plot, chart         drawings for a page
processor           the CPU's name
resumable           unfinished folders, workers, progress
written             where a tool may write
"""
