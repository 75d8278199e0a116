"""What runs at a site."""

import selffl.data
from digits_app.task import CLIENTS, model
from selffl.flower import client_app


def load_data(client_id):
    """The site's own rows, to train and to test on; here its part of an embedded data set."""
    sites = selffl.data.load("digits", num_clients=len(CLIENTS))
    train, test = (slice(*rows.offset[client_id : client_id + 2]) for rows in (sites.train, sites.test))
    return sites.train.features[train], sites.train.labels[train], sites.test.features[test], sites.test.labels[test]


app = client_app(model, load_data, "self-fl")
