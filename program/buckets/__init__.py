"""Objects in buckets, `s3://BUCKET/KEY`, `gs://BUCKET/KEY` and `hf://datasets/OWNER/NAME/PATH`, through fsspec.

The one door to object storage: nothing else of the project imports fsspec, s3fs or botocore.

    names       what is the URL of an object, and its parts
    faults      what an error of a library or a server means: does it pass, what to do
    client      facts of objects, listings, reads of ranges, conditional and plain writes, deletions; each tried again
    transfer    whole files up and down, in parts at a time

Credentials come from where the ecosystem keeps them (AWS_ACCESS_KEY_ID, AWS_PROFILE, ~/.aws, the instance's role,
AWS_ENDPOINT_URL for servers other than Amazon's; GOOGLE_APPLICATION_CREDENTIALS; HF_TOKEN) and never from a recipe or a
flag, so that none is in a log, a report or a list of processes.
"""
