//! What is taken, what is refused, and that the operator's page has every key.

use super::*;

fn parse(text: &str) -> Result<Config, ConfigError> {
    let file: Result<ConfigFile, _> = toml::from_str(text);
    file.map_err(|error| ConfigError::Parse {
        path: "test".into(),
        reason: error.to_string(),
    })?
    .validate()
}

#[test]
fn no_config_is_one_useful_node() {
    let config = parse("").unwrap();
    assert!(config.peers.is_empty() && config.geometry.is_none());
    assert!(config.budget > 0);
}

#[test]
fn the_example_for_operators_holds() {
    let config = parse(include_str!("../../../deploy/storaged.toml")).unwrap();
    assert_eq!((config.members.len(), config.peers.len()), (6, 5));
    assert!(config.geometry.is_some() && config.durable.is_some());
}

#[test]
fn an_unknown_key_is_named_with_those_that_are_known() {
    let error = parse("[memory]\nbugdet = '1GiB'\n")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("bugdet") && error.contains("budget") && error.contains("line 2"),
        "{error}"
    );
}

#[test]
fn an_unknown_key_of_the_durable_tier_is_named() {
    let error = parse("[durable]\nkind = 'directory'\npath = '/a'\npaht = '/b'\n")
        .unwrap_err()
        .to_string();
    assert!(error.contains("paht") && error.contains("path"), "{error}");
}

/// Keys of a section, from the error that an unknown one gets.
fn keys(section: &str, text: &str) -> Vec<String> {
    let error = toml::from_str::<ConfigFile>(&format!("{text}\nzzz = 1\n")).unwrap_err();
    let (_, known) = error
        .message()
        .split_once("expected ")
        .expect("names the known keys");
    let names = known.split('`').skip(1).step_by(2);
    names.map(|name| format!("{section}.{name}")).collect()
}

#[test]
fn the_operators_page_has_every_key() {
    let page = include_str!("../../../docs/operate/config.md");
    let sections = [
        ("node", "[node]"),
        ("tls", "[tls]"),
        ("peers", "[[peers]]"),
        ("coding", "[coding]"),
        ("memory", "[memory]"),
        ("scrub", "[scrub]"),
        ("tenants", "[[tenants]]"),
        ("admin", "[admin]"),
        ("log", "[log]"),
        ("durable", "[durable]\nkind = 'directory'"),
        ("durable", "[durable]\nkind = 's3'"),
        ("trickle", "[trickle]"),
        ("trickle.encryption", "[trickle.encryption]"),
        ("encode", "[encode]"),
        ("hyperpod", "[hyperpod]"),
    ];
    for (section, text) in sections {
        let keys = keys(section, text);
        assert!(!keys.is_empty(), "{section} has keys: {keys:?}");
        for key in keys {
            assert!(page.contains(&format!("`{key}`")), "{key} is not explained");
        }
    }
}

#[test]
fn repairs_are_bounded_unless_nobody_wants_it() {
    let rate = |text| parse(text).unwrap().repair_rate.map_or(0, NonZeroU64::get);
    assert_eq!(rate("[encode]"), 128 << 20);
    assert_eq!(rate("[encode]\nrepair_rate = '1MiB'"), 1 << 20);
    assert_eq!(rate("[encode]\nrepair_rate = '0B'"), 0);
}

#[test]
fn a_wrong_type_says_where() {
    let error = parse("[coding]\nk = 4\nm = 'two'\n")
        .unwrap_err()
        .to_string();
    assert!(error.contains("line 3"), "{error}");
}

#[test]
fn keys_of_the_tier_come_from_one_place_that_can_be_used() {
    let tier = "[durable]\nkind = 's3'\nbucket = 'b'\n[trickle.encryption]\n";
    let key = "trickle.encryption.key_file";
    let command = "trickle.encryption.key_command";
    let within = "trickle.encryption.key_command_within";
    let program = "key_command = ['/bin/cat']\n";
    for (text, key) in [
        (tier.to_owned(), key),
        (format!("{tier}key_file = '/none'"), key),
        (format!("{tier}{program}key_file = '/none'"), key),
        (format!("{tier}key_command = ['cat']"), command),
        (format!("{tier}{program}key_command_within = '1h'"), within),
        (
            format!("[trickle.encryption]\n{program}"),
            "trickle.encryption",
        ),
    ] {
        let error = parse(&text).unwrap_err();
        assert!(
            matches!(&error, ConfigError::Value { key: got, .. } if *got == key),
            "{text}: {error}"
        );
    }
    let config = parse(&format!("{tier}{program}"));
    assert!(config.unwrap().encryption.is_some());
}

#[test]
fn values_that_cannot_hold_are_refused_with_their_key() {
    for (text, key) in [
        ("[node]\nname = 'A'", "node.name"),
        ("[node]\nfailure_domain = 'zone-a/'", "node.failure_domain"),
        ("[coding]\nk = 4\nm = 2", "coding"),
        ("[coding]\nk = 0\nm = 2", "coding"),
        ("[memory]\nbudget = '900TiB'", "memory.budget"),
        ("[memory]\nslots_per_rank = 1", "memory.slots_per_rank"),
        ("[memory]\nkeep_steps = 0", "memory.keep_steps"),
        ("[memory]\nkeep_steps = 3", "memory.keep_steps"),
        ("[trickle]\npart = '1KiB'", "trickle.part"),
        ("[trickle]\nin_flight = '1MiB'", "trickle.in_flight"),
        ("[trickle]\nin_flight = '65GiB'", "trickle.in_flight"),
        ("[trickle]\nrate = '0B'", "trickle.rate"),
        ("[encode]\nlink_rate = '0B'", "encode.link_rate"),
        ("[encode]\nthreads = 0", "encode.threads"),
        ("[encode]\nthreads = 1\ncores = [0]", "encode.threads"),
        ("[encode]\ncores = [1, 1]", "encode.cores"),
        ("[encode]\ncores = []", "encode.cores"),
        ("[encode]\ncores = [9999]", "encode.cores"),
        ("[encode]\ncores = [1023]", "encode.cores"),
        ("[network]\nthreads = 257", "network.threads"),
        ("[network]\nthreads = 1\ncores = [0]", "network.threads"),
        ("[network]\ncores = [1, 1]", "network.cores"),
        ("[network]\ncores = [1023]", "network.cores"),
        ("[hyperpod]", "hyperpod.token_file"),
        ("[hyperpod]\ntoken_file = '/none'", "hyperpod.token_file"),
        (
            "[hyperpod]\nwithout_token = true\nlisten = '0.0.0.0:9200'",
            "hyperpod.listen",
        ),
        (
            "[hyperpod]\nwithout_token = true\nsave_wait = '1h'",
            "hyperpod.save_wait",
        ),
        ("[memory]\nbudget = '1MiB'", "memory.budget"),
        ("[memory]\nbudget = '0B'", "memory.budget"),
        ("[log]\nfilter = 'storaged=loud'", "log.filter"),
        (
            "[durable]\nkind = 'directory'\npath = 'tier'",
            "durable.path",
        ),
        ("[trickle]\nevery = 10", "trickle.every"),
        ("[trickle]\nkeep_last = 3", "trickle.keep_last"),
        ("[trickle]\nin_flight = '1GiB'", "trickle.in_flight"),
        ("[trickle]\nrate = '1MB'", "trickle.rate"),
        ("[encode.node_rates]\nn7 = '1MB'", "encode.node_rates"),
        ("[trickle]\nincrements = 33", "trickle.increments"),
        ("[trickle]\nkeep_every = 10", "trickle.keep_every"),
        ("[[peers]]\nname = 'b'\naddress = '127.0.0.2:9300'", "tls"),
        (
            "tls = { ca = 'a', certificate = 'b', key = 'c', spiffe = 'spiffe://x/y' }",
            "tls.spiffe",
        ),
        (
            "tls = { ca = 'a', certificate = 'b', key = 'c' }\nnode = { name = 'b' }\n\
             [[peers]]\nname = 'b'\naddress = '127.0.0.2:9300'",
            "peers.name",
        ),
        ("[scrub]\nperiod = '365d'", "scrub.period"),
        ("[scrub]\nperiod = '213503982334601d'", "scrub.period"),
        ("[scrub]\nperiod = '99999999999999999999d'", "period"),
        ("[scrub]\nhook_within = '0s'", "scrub.hook_within"),
        ("[scrub]\nhook_within = '2h'", "scrub.hook_within"),
        ("[scrub]\nhook = ['bin/sh']", "scrub.hook"),
        ("[scrub]\nhook = ['/nonexistent/drain']", "scrub.hook"),
        ("[scrub]\nhook = ['/etc']", "scrub.hook"),
        ("[scrub]\nhook = ['/etc/passwd']", "scrub.hook"),
        ("[scrub]\nhook = ['/bin/sh']\nperiod = '0s'", "scrub.hook"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(key), "{text}: {error}");
    }
}

/// A file that all nodes share: `[[peers]]` names the node that reads it too.
fn shared(node: &str, peers: &str) -> Result<Config, ConfigError> {
    parse(&format!(
        "node = {{ name = '{node}' }}\ntls = {{ ca = 'a', certificate = 'b', key = 'c' }}\n[coding]\nk = 2\nm = 1\n{peers}"
    ))
}

#[test]
fn one_file_with_host_lists_does_for_all_nodes() {
    let text = "[[peers]]\nname = 'n[08-11]'\naddress = 'n[08-11].cluster:9300'\nfailure_domain = 'rack[1-4]'\n\
                [[peers]]\nname = 'login'\naddress = '10.0.0.9:9300'";
    let mut one = shared("n09", text).unwrap();
    let mut other = shared("n11", text).unwrap();
    let named = |config: &Config| -> Vec<String> {
        let peers = config.peers.iter();
        peers
            .map(|it| format!("{} at {}", it.name, it.address))
            .collect()
    };
    assert_eq!(
        named(&one),
        [
            "n08 at n08.cluster:9300",
            "n10 at n10.cluster:9300",
            "n11 at n11.cluster:9300",
            "login at 10.0.0.9:9300"
        ]
    );
    one.members.sort();
    other.members.sort();
    assert_eq!(one.members, other.members);
    let domains: Vec<&str> = one
        .members
        .iter()
        .map(|it| it.failure_domain.as_str())
        .collect();
    assert_eq!(domains, ["login", "rack1", "rack2", "rack3", "rack4"]);
    // A node that no list names is a member beside them.
    assert_eq!(shared("n12", text).unwrap().members.len(), 6);
}

/// Its host has another name than the list has for it, most often; its peers would link to nobody of that name.
#[test]
fn a_node_that_no_host_list_names_is_warned_of() {
    let list = "[[peers]]\nname = 'n[1-3]'\naddress = 'n[1-3]:9300'";
    let other = "[[peers]]\nname = 'n[5-7]'\naddress = 'n[5-7]:9300'";
    let single = "[[peers]]\nname = 'login'\naddress = 'login:9300'";
    for (node, peers, named) in [
        ("n2", list.to_owned(), true),
        ("n6", format!("{list}\n{other}"), true),
        ("n2.cluster", list.to_owned(), false),
        ("n4", format!("{list}\n{other}"), false),
        ("n4", format!("{list}\n{single}"), false),
        ("n4", single.to_owned(), true),
        ("n4", String::new(), true),
    ] {
        let tls = "tls = { ca = 'a', certificate = 'b', key = 'c' }";
        let config = parse(&format!("node = {{ name = '{node}' }}\n{tls}\n{peers}"));
        let warning = config.unwrap().own_listing.warning();
        assert_eq!(warning.is_none(), named, "{node}: {warning:?}");
        if let Some(warning) = warning {
            for part in [node, "peers.name", "node.name"] {
                assert!(warning.contains(part), "{warning}");
            }
        }
    }
}

#[test]
fn what_the_loss_of_a_failure_domain_costs_is_told_by_level() {
    for (domains, told) in [
        (
            "z[1-3]/r[1-2]",
            "at most 1 at level 1 (its loss is borne), 1 at level 2 (its loss is borne)",
        ),
        (
            "z[1-2]/r[1-3]",
            "at most 2 at level 1 (its loss is not borne), 1 at level 2 (its loss is borne)",
        ),
        ("r[1-6]", "at most 1 (its loss is borne)"),
        // A code alone is not enough: who is left must know that there is nothing newer.
        (
            "z1/a,z1/b,z2/a,z2/b,z2/c,z2/d",
            "at level 1 (its loss is not borne), 1 at level 2 (its loss is borne)",
        ),
    ] {
        let peers = format!(
            "[[peers]]\nname = 'n[1-6]'\naddress = 'n[1-6]:1'\nfailure_domain = '{domains}'"
        );
        let config = shared("n2", &peers).unwrap();
        let all = config.domains_told(&config.members).unwrap();
        assert!(all.ends_with(told), "{domains}: {all}");
    }
}

/// What was protected in RAM after the last copy it does not know.
#[test]
fn a_durable_tier_does_not_stand_in_for_a_majority() {
    let peers = "[[peers]]\nname = 'n[1-2]'\naddress = 'n[1-2]:1'\nfailure_domain = 'r[1-2]'\n";
    for tier in ["", "[durable]\nkind = 'directory'\npath = '/shared'"] {
        let config = shared("n1", &format!("{peers}{tier}")).unwrap();
        let told = config.domains_told(&config.members).unwrap();
        let no_majority = "leaves no majority: the restart needs --allow-older)";
        assert!(told.ends_with(no_majority), "{told}");
    }
}

#[test]
fn lists_that_do_not_fit_one_another_are_refused_with_their_key() {
    let one = "name = 'n1'\naddress = '[::1]:9300'";
    assert_eq!(
        shared(
            "n2",
            &format!("[[peers]]\n{one}\n[[peers]]\nname='n3'\naddress='n3:1'")
        )
        .unwrap()
        .peers
        .len(),
        2
    );
    for (peers, key) in [
        ("name = 'n[1-3'\naddress = 'n1:9300'", "peers.name"),
        ("name = 'n[1-3]'\naddress = 'n[1-2]:9300'", "peers.address"),
        ("name = 'n[1-3]'\naddress = '[::1]:9300'", "peers.address"),
        ("name = 'n1'\naddress = 'n1'", "peers.address"),
        (
            "name = 'n[1-3]'\naddress = 'n[1-3]:1'\nfailure_domain = 'r[1-2]'",
            "peers.failure_domain",
        ),
        (
            "name = 'n1'\naddress = 'n1:1'\nfailure_domain = 'rack '",
            "peers.failure_domain",
        ),
        ("name = 'n[1-3],n2'\naddress = 'n[1-4]:1'", "peers.name"),
        (
            "name = 'n[1-3],n9'\naddress = 'n[1-4]:1'\n[[peers]]\nname = 'n9'\naddress = 'n9:1'",
            "peers.name",
        ),
    ] {
        let error = shared("n9", &format!("[[peers]]\n{peers}")).unwrap_err();
        assert!(
            matches!(&error, ConfigError::Value { key: got, .. } if *got == key),
            "{peers}: {error}"
        );
    }
}

#[test]
fn tenants_that_cannot_be_are_refused() {
    for (text, key) in [
        (
            "[[tenants]]\ndirectory='/a'\nuids=[1]\n[[tenants]]\ndirectory='/a'\nuids=[2]",
            "tenants.directory",
        ),
        (
            "[[tenants]]\ndirectory='/a'\nuids=[1]\n[[tenants]]\ndirectory='/b'\nuids=[2]",
            "tenants.name",
        ),
        (
            "[[tenants]]\nname='x'\ndirectory='/a'\nuids=[1]\n[[tenants]]\nname='x'\ndirectory='/b'\nuids=[2]",
            "tenants.name",
        ),
        (
            "[[tenants]]\nname='x~y'\ndirectory='/a'\nuids=[1]",
            "tenants.name",
        ),
        (
            "[[tenants]]\ndirectory='/a'\nuids=[1]\nnew_jobs_max=513",
            "tenants.new_jobs_max",
        ),
        (
            "[[tenants]]\ndirectory='/a'\nuids=[1]\nmemory_max='0B'",
            "tenants.memory_max",
        ),
        (
            "[[tenants]]\ndirectory='/a'\nuids=[1]\ntrickle_rate='0B'",
            "tenants.trickle_rate",
        ),
        (
            "[[tenants]]\ndirectory='/a'\nuids=[1]\nconnections_max=1025",
            "tenants.connections_max",
        ),
        (
            "[[tenants]]\ndirectory='/a'\nuids=[1]\nconnections_max=0",
            "tenants.connections_max",
        ),
        (
            "[memory]\nbudget='64MiB'\n[[tenants]]\ndirectory='/a'\nuids=[1]\nmemory_guaranteed='65MiB'",
            "tenants.memory_guaranteed",
        ),
        ("[[tenants]]\ndirectory='/a'\nuids=[]", "tenants.uids"),
        ("[[tenants]]\ndirectory='a'\nuids=[1]", "tenants.directory"),
    ] {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.contains(key), "{text}: {error}");
    }
}

/// Each says what was expected, what was got and what to do.
#[test]
fn what_would_fail_or_do_nothing_later_is_said_with_what_to_do() {
    for (text, words) in [
        (
            "[memory]\nbudget = '1MiB'",
            ["expected at least 4.0 MiB", "got 1.0 MiB", "raise it"],
        ),
        (
            "[encode]\ncores = [9999]",
            [
                "expected cores that this process may use (",
                "got 9999",
                "name others",
            ],
        ),
        (
            "[log]\nfilter = 'storaged=loud'",
            [
                "expected a log filter such as info",
                "got \"storaged=loud\"",
                "expected one of",
            ],
        ),
        (
            "[durable]\nkind = 'directory'\npath = 'tier'",
            ["expected an absolute path", "got tier", "any directory"],
        ),
        (
            "[trickle]\nevery = 10",
            [
                "expected a durable tier",
                "got none and 10",
                "add [durable]",
            ],
        ),
    ] {
        let error = parse(text).unwrap_err().to_string();
        for word in words {
            assert!(error.contains(word), "{text}: {word:?} in {error}");
        }
    }
}

#[test]
fn a_budget_counts_the_parity_of_others() {
    let alone = parse("[memory]\nbudget = '4MiB'").unwrap();
    assert_eq!(alone.budget_min(), 4 << 20);
    let text = "tls = { ca = 'a', certificate = 'b', key = 'c' }\nnode = { name = 'a' }\n\
                [coding]\nk = 1\nm = 1\n[memory]\nbudget = '4MiB'\n\
                [[peers]]\nname = 'b'\naddress = '127.0.0.2:9300'";
    let error = parse(text).unwrap_err().to_string();
    assert!(error.contains("expected at least 4.5 MiB"), "{error}");
}

/// Of three nodes whose groups are (2,1) two code for the group of another one, and one for none.
#[test]
fn the_bill_counts_slots_as_they_are_taken() {
    let most = |name: &str, ranks: u64| {
        let peers = ["n0", "n1", "n2"].iter().filter(|peer| **peer != name);
        let peers: String = peers
            .map(|peer| format!("[[peers]]\nname = '{peer}'\naddress = '127.0.0.2:9300'\n"))
            .collect();
        let text = format!(
            "tls = {{ ca = 'a', certificate = 'b', key = 'c' }}\nnode = {{ name = '{name}' }}\n\
             [coding]\nk = 2\nm = 1\n[memory]\nbudget = '44MiB'\n{peers}"
        );
        let config = parse(&text).unwrap();
        config.shard_bytes_max(ranks)
    };
    let mut all = ["n0", "n1", "n2"].map(|name| most(name, 1));
    all.sort_unstable();
    // Three slots of 8 MiB, for 7 and what Python asks for above them, and parity of two steps; or three slots of 14 MiB.
    assert_eq!(all, [7 << 20, 7 << 20, 13 << 20]);
    assert_eq!(["n0", "n1", "n2"].map(|name| most(name, 8)), [0; 3]);
}

#[test]
fn python_asks_for_what_the_bill_counts() {
    let arena = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../sdk/python/python/storaged/torch/_arena.py"
    );
    let arena = std::fs::read_to_string(arena).unwrap();
    let line = arena.lines().find(|line| line.starts_with("SPARE_BYTES ="));
    assert_eq!(line, Some("SPARE_BYTES = 1 << 20"));
    assert_eq!(super::bill::PYTHON_SPARE_BYTES, 1 << 20);
}
